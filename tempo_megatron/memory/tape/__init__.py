"""Records what one micro batch allocates: storages, from their making until they are freed, and who made them."""
