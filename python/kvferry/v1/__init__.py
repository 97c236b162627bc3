"""Generated from proto/kvferry/v1 (make generate)."""
