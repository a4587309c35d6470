"""Copies of KV blocks between the device, its tiers and other engines."""
