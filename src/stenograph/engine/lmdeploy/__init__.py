"""LMDeploy's routes that take ids."""
