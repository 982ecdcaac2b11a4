//! Telling what is there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::UNIX_EPOCH;

use overlaybd::Image;
use serde_json::{json, Map, Value};

use super::Service;
use crate::Error;

impl Service {
    pub(super) fn version(&self) -> Value {
        let ublk = match &self.targets.ublk {
            Ok(_) => json!({"available": true}),
            Err(reason) => json!({"available": false, "reason": reason}),
        };
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "pid": std::process::id(),
            "mount": self.targets.mount.to_string_lossy(),
            "workers": self.targets.fuse.workers(),
            "targets": {"fuse": {"available": true}, "ublk": ublk},
        })
    }

    pub(super) fn list(&self) -> Value {
        let images: Vec<Value> = self
            .table
            .after(0)
            .iter()
            .map(|image| {
                let (path, target) = self.place(image.name());
                json!({
                    "image": image.name(),
                    "path": path.to_string_lossy(),
                    "target": target,
                    "size": image.size(),
                    "writable": image.is_writable(),
                    "blank": image.is_blank(),
                })
            })
            .collect();
        json!({"images": images})
    }

    pub(super) fn stat(&self, name: &str) -> Result<Value, Error> {
        let image = self.table.require(name)?;
        let (path, target) = self.place(name);
        let content = image.image().ok();
        let stack = content.map(Image::stack);
        let layers: Vec<Value> = stack
            .iter()
            .flat_map(|stack| stack.layers())
            .map(|layer| {
                let info = layer.info();
                json!({
                    "uuid": info.uuid.to_string(),
                    "parent": info.parent.to_string(),
                    "virtual_size": info.virtual_size,
                    "bytes": layer.source().size(),
                    "path": image.file(layer).map(|path| path.to_string_lossy().into_owned()),
                    "durable": layer.is_durable(),
                })
            })
            .collect();
        let upper = content.and_then(Image::upper).map(|upper| {
            let stats = upper.stats();
            json!({
                "uuid": upper.info().uuid.to_string(),
                "mode": if upper.is_sparse() { "sparse" } else { "log" },
                "stored": stats.stored,
                "live": stats.live,
                "extents": stats.extents,
            })
        });
        let counters = image.counters();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let since = image.attached_at().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(json!({
            "image": name,
            "path": path.to_string_lossy(),
            "target": target,
            "size": image.size(),
            "owner": image.owner(),
            "attached_at": since.as_secs_f64(),
            "handles": image.handles().open(),
            "layers": layers,
            "extents": stack.map_or(0, |stack| stack.extents()),
            "upper": upper,
            "blank": content.is_none(),
            "recording": image.recorder().is_some(),
            "counters": Map::from_iter([
                ("reads", &counters.reads),
                ("read_bytes", &counters.read_bytes),
                ("writes", &counters.writes),
                ("written_bytes", &counters.written_bytes),
                ("flushes", &counters.flushes),
                ("errors", &counters.errors),
            ].map(|(name, counter)| (name.to_owned(), count(counter).into()))),
        }))
    }
}
