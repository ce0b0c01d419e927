"""Tools that measure the course itself. They may import `utils`, which never imports them."""
