"""A router in front of identical servers: chooses one for each request, and passes the bytes on."""
