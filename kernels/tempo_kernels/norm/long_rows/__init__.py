"""The norms of rows that do not fit into the registers of one program on a GPU."""
