"""The commands `ledger`, `estimate`, `plan`, `flops` and `bench`, and the arguments that they share."""
