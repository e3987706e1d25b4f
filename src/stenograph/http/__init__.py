"""Sockets to turns and back; app.py wires everything."""
