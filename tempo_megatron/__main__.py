"""`python -m tempo_megatron` is the `tempo-megatron` command."""

import sys

from tempo_megatron.cli import main

sys.exit(main())
