"""A folder for PYTHONPATH, of boots that are thrown away: what each of their Python processes runs first."""
