"""What attention means: the call, its definition, its dropout bits and its torch operators."""
