"""Tools to prove attention right: input factories, guard buffers, error budgets, conformance."""
