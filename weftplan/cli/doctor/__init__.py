"""``weftplan doctor``: a report of installed packages and the settings in force."""
