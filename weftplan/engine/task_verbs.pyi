from typing import Any

from weftplan.tasks import Task as Task
from weftplan.tasks import as_completed as as_completed
from weftplan.tasks import future as future
from weftplan.tasks import map as map
from weftplan.tasks import submit as submit
from weftplan.tasks import task as task
from weftplan.tasks import tiles as tiles
from weftplan.tasks import var_of as var_of
from weftplan.tasks import wait as wait

NAMES: tuple[str, ...]

def verb(name: str) -> Any: ...
