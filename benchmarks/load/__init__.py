"""Driving a server from outside and watching what it costs: wrk, process times, slices in turn."""
