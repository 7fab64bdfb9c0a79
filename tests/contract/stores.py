"""What the contract of stores is run on."""

STORES = ["local", "device", "local_update_cpu", "local_allreduce_cpu", "local_allreduce_device"]
