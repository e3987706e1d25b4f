"""The size of the whole house, as docs/design.md has it: `scripts/measure-house` measures and prints it."""
