"""Arrays that are offloaded while memory is short, and chunks that hold memory only while it is needed."""
