"""Clients beside each other: one account for each, and turns for what they make a front end do."""
