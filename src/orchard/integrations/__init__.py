"""Ways into Orchard from other libraries. Nothing here is active until it is asked for."""
