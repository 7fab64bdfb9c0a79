"""Array files and memory of other libraries: ``.params``, safetensors, DLPack, NumPy."""
