"""Who serves a call: capabilities, plans, the journal and the settings that steer them."""
