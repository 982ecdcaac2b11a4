//! Up to 255 layers seen as one.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::image::{fill, ReadError};
use crate::index::{merge_all, overlay, resolve, Segment, Table};
use crate::layer::{Layer, OpenLayerError};
use crate::lsmt::{Extent, SECTOR};
use crate::sync::lock;

/// The most layers a stack may have (`MAX_STACK_LAYERS` in overlaybd's `file.h`).
pub const MAX_LAYERS: usize = 255;

/// Threads that read indexes at once when a stack is opened: enough to hide the latency of remote ones.
const LOADERS: usize = 8;

/// Whether each layer must name the one beneath it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParentCheck {
    /// Refuse a layer whose parent is not the layer beneath. Unset identifiers are not compared.
    Enforce,
    /// Take the order as given.
    Ignore,
}

/// Why layers cannot be stacked.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum StackError {
    /// a stack holds at most 255 layers, not {0}
    TooMany(usize),
    /// layer {layer} was made on top of {expected}, but beneath it is {found}
    Parent {
        /// Position from the bottom.
        layer: usize,
        /// The parent it names.
        expected: crate::Uuid,
        /// The layer that is there.
        found: crate::Uuid,
    },
    /// layer {0} cannot be used
    Layer(usize, #[source] OpenLayerError),
    /// the layers to replace are not a run of this stack
    NotThere,
}

/// Immutable layers and their merged index. Cheap to share: images on the same layers hold one stack.
pub struct Stack {
    layers: Vec<Arc<Layer>>,
    /// Merged indexes, the first hiding the others; the tags are positions in `layers`. One after opening;
    /// each sealed upper adds one and similar sizes are merged, so there are O(log n).
    levels: Vec<Table>,
    virtual_size: u64,
}

impl Stack {
    /// Stacks layers, the lowest first, reading and merging their indexes. The virtual size is that of the highest
    /// layer that has one.
    ///
    /// # Errors
    /// [`StackError`].
    pub fn open(layers: Vec<Arc<Layer>>, check: ParentCheck) -> Result<Self, StackError> {
        if layers.len() > MAX_LAYERS {
            return Err(StackError::TooMany(layers.len()));
        }
        if check == ParentCheck::Enforce {
            check_parents(&layers)?;
        }
        let mut tables = load_indexes(&layers)?;
        (0u8..).zip(&mut tables).for_each(|(tag, table)| set_tag(table, tag));
        let merged = merge_all(tables);
        let virtual_size = layers.iter().rev().map(|layer| layer.info().virtual_size).find(|size| *size > 0);
        Ok(Self { levels: vec![merged.into()], virtual_size: virtual_size.unwrap_or(0), layers })
    }

    /// A stack of nothing: all zeroes.
    pub fn empty() -> Self {
        Self { layers: Vec::new(), levels: Vec::new(), virtual_size: 0 }
    }

    /// The layers, the lowest first.
    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    /// Size in bytes as its layers tell it.
    pub fn virtual_size(&self) -> u64 {
        self.virtual_size
    }

    /// Extents held in memory, at 16 bytes each.
    pub fn extents(&self) -> usize {
        self.levels.iter().map(|level| level.len()).sum()
    }

    /// The byte after the last one that a layer says anything about; of layers nobody checked, it may lie beyond their size.
    pub fn end(&self) -> u64 {
        self.levels.iter().filter_map(|level| level.last()).map(|last| last.end() * SECTOR).max().unwrap_or(0)
    }

    /// The identifier of the highest layer, or [`crate::Uuid::NIL`].
    pub fn top(&self) -> crate::Uuid {
        self.layers.last().map_or(crate::Uuid::NIL, |layer| layer.info().uuid)
    }

    /// Splits the sectors `start..end` by where they live.
    pub fn resolve(&self, start: u64, end: u64, out: &mut Vec<Segment>) {
        resolve(&self.levels, start, end, out);
    }

    /// The whole merged index of a stack that has just been opened, which has a single level.
    pub(crate) fn merged(&self) -> &[Extent] {
        debug_assert!(self.levels.len() <= 1);
        self.levels.first().map_or(&[], |level| level)
    }

    /// Reads bytes, fewer than asked for at the end of the stack.
    ///
    /// # Errors
    /// [`ReadError`] if a layer's source failed.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        let len = self.virtual_size.saturating_sub(offset).min(buf.len() as u64) as usize;
        self.read_range(&mut buf[..len], offset)?;
        Ok(len)
    }

    /// Reads bytes regardless of the virtual size: the upper may be larger than what is beneath.
    pub(crate) fn read_range(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        if buf.is_empty() {
            return Ok(());
        }
        let mut segments = Vec::new();
        self.resolve(offset / SECTOR, (offset + buf.len() as u64).div_ceil(SECTOR), &mut segments);
        fill(buf, offset, &segments, |layer| &**self.layers[usize::from(layer)].source())
    }

    /// This stack with more layers on top, the lowest first. The work is in proportion to them, not to the stack, and what
    /// the stack's index takes in memory is shared.
    ///
    /// # Errors
    /// [`StackError`].
    pub fn extend(&self, layers: &[Arc<Layer>], check: ParentCheck) -> Result<Self, StackError> {
        let all: Vec<_> = self.layers.iter().chain(layers).cloned().collect();
        if all.len() > MAX_LAYERS {
            return Err(StackError::TooMany(all.len()));
        }
        if check == ParentCheck::Enforce {
            check_parents(&all)?;
        }
        let mut stack =
            Self { layers: self.layers.clone(), levels: self.levels.clone(), virtual_size: self.virtual_size };
        for layer in layers {
            let table = layer.load_index().map_err(|e| StackError::Layer(stack.layers.len(), e))?;
            stack = stack.push(layer.clone(), table)?;
        }
        Ok(stack)
    }

    /// This stack with a freshly sealed layer on top, whose index is known. The work is in proportion to the
    /// layer, not to the stack.
    pub(crate) fn push(&self, layer: Arc<Layer>, mut top: Vec<Extent>) -> Result<Self, StackError> {
        if self.layers.len() >= MAX_LAYERS {
            return Err(StackError::TooMany(self.layers.len() + 1));
        }
        set_tag(&mut top, self.layers.len() as u8);
        let mut levels = &self.levels[..];
        // Merging only what is at most twice as large keeps the levels few and each extent's merges few.
        while let [next, rest @ ..] = levels {
            if next.len() > 2 * top.len() {
                break;
            }
            if !next.is_empty() {
                top = overlay(&top, next);
            }
            levels = rest;
        }
        let virtual_size = match layer.info().virtual_size {
            0 => self.virtual_size,
            size => size,
        };
        let mut layers = self.layers.clone();
        layers.push(layer);
        let levels = std::iter::once(top.into()).chain(levels.iter().cloned()).collect();
        Ok(Self { layers, levels, virtual_size })
    }

    /// This stack with a run of its layers replaced by one layer that holds the same, as made by
    /// [`crate::compact`].
    ///
    /// # Errors
    /// [`StackError::NotThere`] if `run` is not a run of this stack, or reading an index failed.
    pub fn replace(&self, run: &[Arc<Layer>], by: Arc<Layer>) -> Result<Self, StackError> {
        let same = |window: &[Arc<Layer>]| window.iter().zip(run).all(|(a, b)| Arc::ptr_eq(a, b));
        let at = match run.len() {
            0 => None,
            n => self.layers.windows(n).position(same),
        };
        let at = at.ok_or(StackError::NotThere)?;
        let mut layers = self.layers.clone();
        layers.splice(at..at + run.len(), [by]);
        Ok(Self { virtual_size: self.virtual_size, ..Self::open(layers, ParentCheck::Ignore)? })
    }

    /// Brings every layer that was sealed in place to stable storage.
    ///
    /// # Errors
    /// The file system failed.
    pub fn sync(&self) -> io::Result<()> {
        self.layers.iter().try_for_each(|layer| layer.sync())
    }
}

fn check_parents(layers: &[Arc<Layer>]) -> Result<(), StackError> {
    for (i, pair) in layers.windows(2).enumerate() {
        let (expected, found) = (pair[1].info().parent, pair[0].info().uuid);
        if !expected.is_nil() && !found.is_nil() && expected != found {
            return Err(StackError::Parent { layer: i + 1, expected, found });
        }
    }
    Ok(())
}

fn set_tag(table: &mut [Extent], tag: u8) {
    table.iter_mut().for_each(|extent| *extent = extent.with_tag(tag));
}

fn load_indexes(layers: &[Arc<Layer>]) -> Result<Vec<Vec<Extent>>, StackError> {
    let load = |i: usize| layers[i].load_index().map_err(|e| StackError::Layer(i, e));
    if layers.len() < 4 {
        return (0..layers.len()).map(load).collect();
    }
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<_>> = Mutex::new(layers.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..LOADERS.min(layers.len()) {
            scope.spawn(|| loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= layers.len() {
                    break;
                }
                let result = load(i);
                if result.is_err() {
                    next.store(layers.len(), Ordering::Relaxed);
                }
                lock(&results)[i] = Some(result);
            });
        }
    });
    let results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // Layers are left out only after one has failed, whose error is then what is returned.
    results.into_iter().flatten().collect()
}
