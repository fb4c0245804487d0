"""`python -m kiln` is the command `kiln`."""

from kiln.cli import app

app(prog_name="kiln")
