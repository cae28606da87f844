"""Background work for Python on PostgreSQL, and nothing but PostgreSQL."""
