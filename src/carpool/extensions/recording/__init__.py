"""Writes when requests arrive to a file, so that `carpool simulate` can replay them."""
