"""Entry point of ``python -m weftplan.cli.doctor``, which runs ``weftplan doctor``."""

from weftplan.cli.doctor.command import command

command()
