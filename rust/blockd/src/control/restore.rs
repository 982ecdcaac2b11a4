//! Writing layers into the memory of a process.

use serde_json::{json, Value};

use super::request::Restore;
use super::Service;
use crate::{restore, Error};

impl Service {
    pub(super) fn restore(&self, request: Restore) -> Result<Value, Error> {
        let Restore { pid, start_time, mappings, layers, size } = request;
        let stack = self.layers.stack(&layers)?;
        let report = restore::restore(&restore::Request { pid, start_time, mappings, stack, size })?;
        let milliseconds = report.time.as_micros() as f64 / 1000.0;
        Ok(json!({"written_bytes": report.written_bytes, "milliseconds": milliseconds}))
    }
}
