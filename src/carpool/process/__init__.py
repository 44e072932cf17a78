"""Defines how the server's processes start, are watched, and stop; what each of them runs is put together
here."""
