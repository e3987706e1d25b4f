"""LMDeploy's routes for ids."""
