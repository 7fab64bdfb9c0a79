"""Arrays that move while memory is short, and chunks that hold memory only while a reader needs it."""
