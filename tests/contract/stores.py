"""Names of the stores for the contract: those of one process, and plug-ins."""

from weftplan.kvstore.base import registered

STORES = ["local", "device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"]
STORES += [name for name in registered() if name != "teststore"]  # this plug-in stores nothing, like MXNet's
