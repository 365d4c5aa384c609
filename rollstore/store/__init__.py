"""The store on disk: journals, parts, the commit log, snapshots and the index. spec/layout.md describes the bytes."""
