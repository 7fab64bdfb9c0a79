"""``weftplan doctor``: what is installed and which settings are in force."""
