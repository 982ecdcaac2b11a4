"""`aenv bench`: the scenarios that measure the service levels of docs/SPECIFICATION.md."""
