"""``python -m weftplan.cli.doctor`` is ``weftplan doctor``."""

from weftplan.cli.doctor.command import command

command()
