//! All layers of the cache, and the hand of the clock that goes round them.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use super::files::Files;
use super::flight::lock;
use super::layout::{Key, LAYER_CHARGE};
use super::state::LayerState;

/// The layers, by key and in the order in which the hand visits them.
#[derive(Default)]
pub(super) struct Registry {
    inner: Mutex<Inner>,
    /// Bytes counted for everything on disk.
    pub(super) used: AtomicU64,
}

#[derive(Default)]
struct Inner {
    by_key: HashMap<Key, Arc<LayerState>>,
    order: Vec<Arc<LayerState>>,
    layer: usize,
    block: u32,
}

/// What the hand met.
pub(super) enum Met {
    /// A cold block, taken for erasing.
    Block(Arc<LayerState>, u32),
    /// A layer whose blocks must be learnt first.
    Unknown(Arc<LayerState>),
    /// A closed layer without blocks: its files can go.
    Empty(Arc<LayerState>),
    /// Nothing can be evicted.
    Nothing,
}

impl Registry {
    /// Looks through the directory of a predecessor: one small read per layer. Removes what is not whole.
    pub(super) fn scan(dir: &Path) -> std::io::Result<Self> {
        let registry = Self::default();
        for entry in std::fs::read_dir(dir)? {
            let name = entry?.file_name();
            let Some(name) = name.to_str().filter(|name| Key::is_ours(name)) else { continue };
            let Some(key) = Key::of_file(name) else {
                let _ = std::fs::remove_file(dir.join(name));
                continue;
            };
            if lock(&registry.inner).by_key.contains_key(&key) {
                continue;
            }
            match Files::open(dir, &key).and_then(|files| Ok((files.size(), files.allocated()?))) {
                Ok((size, allocated)) => {
                    registry.insert(Arc::new(LayerState::new(key, size, allocated)));
                    registry.used.fetch_add(allocated + LAYER_CHARGE, Relaxed);
                }
                Err(_) => Files::remove(dir, &key),
            }
        }
        Ok(registry)
    }

    fn insert(&self, layer: Arc<LayerState>) {
        let mut inner = lock(&self.inner);
        inner.by_key.insert(layer.key.clone(), layer.clone());
        inner.order.push(layer);
    }

    /// The layer of that key, new if there is none, with its files open and its blocks known. No files (the cache's disk
    /// fails or is full): the layer works, but nothing of it is stored.
    pub(super) fn open(&self, dir: &Path, key: Key, size: u64) -> (Arc<LayerState>, Option<Arc<Files>>) {
        let (layer, files) = {
            // Opening files under the lock keeps them from being removed as those of an empty layer at the same time.
            let mut inner = lock(&self.inner);
            let known = inner.by_key.get(&key).filter(|layer| layer.size == size && layer.poison().is_none()).cloned();
            let layer = known.unwrap_or_else(|| {
                if inner.by_key.contains_key(&key) {
                    // Poisoned, and not forgotten yet.
                    Files::remove(dir, &key);
                }
                let layer = Arc::new(LayerState::new(key.clone(), size, 0));
                if let Some(old) = inner.by_key.insert(key, layer.clone()) {
                    inner.order.retain(|other| !Arc::ptr_eq(other, &old));
                    self.uncount(&old);
                }
                self.used.fetch_add(LAYER_CHARGE, Relaxed);
                inner.order.push(layer.clone());
                layer
            });
            let files = layer.files(dir, true);
            (layer, files)
        };
        let files =
            files.map_err(|error| tracing::warn!(%error, "a layer is not cached: its files cannot be made")).ok();
        self.learn(&layer, files.as_deref());
        (layer, files)
    }

    /// Learns a layer's blocks and corrects the count.
    pub(super) fn learn(&self, layer: &LayerState, files: Option<&Files>) {
        let correction = layer.load(files);
        if correction >= 0 {
            self.used.fetch_sub(correction as u64, Relaxed);
        } else {
            self.used.fetch_add(correction.unsigned_abs(), Relaxed);
        }
    }

    /// Forgets a layer that nobody has open (or that must go), with its files.
    pub(super) fn forget(&self, dir: &Path, layer: &Arc<LayerState>, even_if_used: bool) {
        let mut inner = lock(&self.inner);
        let current = inner.by_key.get(&layer.key).is_some_and(|other| Arc::ptr_eq(other, layer));
        let idle = layer.present() == 0 && layer.open_files().is_none() && layer.flights.is_empty();
        if !current || !(idle || even_if_used) {
            return;
        }
        inner.by_key.remove(&layer.key);
        inner.order.retain(|other| !Arc::ptr_eq(other, layer));
        Files::remove(dir, &layer.key);
        self.uncount(layer);
    }

    fn uncount(&self, layer: &LayerState) {
        self.used.fetch_sub(LAYER_CHARGE + layer.unloaded.load(Relaxed), Relaxed);
    }

    /// Moves the hand to the next block that can go. Three rounds at most: two take the marks off.
    pub(super) fn advance(&self) -> Met {
        let mut inner = lock(&self.inner);
        let layers = inner.order.len();
        for _ in 0..=3 * layers {
            if inner.layer >= inner.order.len() {
                (inner.layer, inner.block) = (0, 0);
            }
            let Some(layer) = inner.order.get(inner.layer).cloned() else { return Met::Nothing };
            if !layer.is_loaded() {
                return Met::Unknown(layer);
            }
            if layer.present() > 0 {
                if let Some(block) = layer.sweep(inner.block) {
                    inner.block = block + 1;
                    return Met::Block(layer, block);
                }
            } else if layer.open_files().is_none() && layer.flights.is_empty() {
                return Met::Empty(layer);
            }
            inner.layer += 1;
            inner.block = 0;
        }
        Met::Nothing
    }

    /// All layers now.
    pub(super) fn layers(&self) -> Vec<Arc<LayerState>> {
        lock(&self.inner).order.clone()
    }
}
