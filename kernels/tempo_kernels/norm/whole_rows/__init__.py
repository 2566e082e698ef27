"""The norms of rows that fit into the registers of one program on a GPU."""
