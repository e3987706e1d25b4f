"""The part of accounts: the fate of every sampled token, and claims of trainers on samples."""
