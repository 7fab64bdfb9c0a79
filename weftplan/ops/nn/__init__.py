"""Neural-network operators. Importing this package registers all of them."""
