"""The plan/run classes of FlashInfer's API."""
