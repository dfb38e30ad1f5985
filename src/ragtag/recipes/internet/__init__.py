"""Recipes of training over the internet: SparseLoCo, NoLoCo, Decoupled DiLoCo and MuLoCo beside DiLoCo."""
