"""How committed turns survive the process."""
