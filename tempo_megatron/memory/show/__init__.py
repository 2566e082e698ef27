"""Shows what a model keeps and what a step allocates: tables, trees, plots and files for viewers."""
