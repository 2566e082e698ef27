"""What one tile of scores is made of on a GPU: its keys' order, dropout, masks and limits."""
