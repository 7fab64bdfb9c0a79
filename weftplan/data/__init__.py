"""Data iterators, records, images, and worker processes that read ahead."""
