"""``weftplan launch``: starts the processes of a distributed kvstore, and reports their exits."""
