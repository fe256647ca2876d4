"""`turngym bench webshop`: steps per second and large shops, against the original's way of working."""
