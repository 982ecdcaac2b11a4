//! Folding a run of layers into one.

use std::io::Write;
use std::sync::Arc;

use crate::image::ReadError;
use crate::layer::Layer;
use crate::lsmt::SECTOR;
use crate::stack::{ParentCheck, Stack, StackError};
use crate::writer::{LayerSummary, LayerWriter, WriteLayerError};
use crate::{LayerInfo, Uuid};

/// Bytes copied at a time.
const STEP: u64 = 1 << 20;
/// Granularity of zero detection, in bytes.
const ZERO_BLOCK: usize = 4096;

/// How to compact.
#[derive(Debug, Clone, Default)]
pub struct CompactOptions {
    /// Nothing lies beneath the run, so zeroes need no entry.
    pub is_base: bool,
    /// Look for blocks of zeroes in the data and leave them out.
    pub detect_zeroes: bool,
    /// Identifier of the result. By default that of the highest layer, so that the layer above still names its parent.
    pub uuid: Option<Uuid>,
}

/// Why layers cannot be compacted.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum CompactError {
    /// there is nothing to compact
    Nothing,
    /// the layers cannot be stacked
    Stack(#[from] StackError),
    /// reading a layer failed
    Read(#[from] ReadError),
    /// writing the compacted layer failed
    Write(#[from] WriteLayerError),
}

/// Writes one layer that reads like the given run (the lowest first), and gives back the writer.
///
/// The layers are only read, so a kill at any moment leaves them as they are.
///
/// # Errors
/// [`CompactError`]; what was written is then incomplete and will not open as a layer.
pub fn compact<W: Write>(
    layers: &[Arc<Layer>],
    out: W,
    options: &CompactOptions,
) -> Result<(W, LayerSummary), CompactError> {
    let (Some(lowest), Some(highest)) = (layers.first(), layers.last()) else {
        return Err(CompactError::Nothing);
    };
    let stack = Stack::open(layers.to_vec(), ParentCheck::Ignore)?;
    let info = LayerInfo {
        virtual_size: stack.virtual_size(),
        uuid: options.uuid.unwrap_or(highest.info().uuid),
        parent: lowest.info().parent,
        user_tag: highest.info().user_tag.clone(),
    };
    let mut writer = LayerWriter::new(out, info)?;
    let mut buf = vec![0u8; STEP as usize];
    for extent in stack.merged() {
        let (mut at, end) = (extent.offset() * SECTOR, extent.end() * SECTOR);
        if extent.is_zero() {
            if !options.is_base {
                writer.zero(at, end - at)?;
            }
            continue;
        }
        while at < end {
            let chunk = &mut buf[..(end - at).min(STEP) as usize];
            stack.read_range(chunk, at)?;
            put(&mut writer, at, chunk, options)?;
            at += chunk.len() as u64;
        }
    }
    Ok(writer.finish()?)
}

/// Writes a chunk, leaving out its blocks of zeroes if asked to.
fn put<W: Write>(
    writer: &mut LayerWriter<W>,
    offset: u64,
    chunk: &[u8],
    options: &CompactOptions,
) -> Result<(), WriteLayerError> {
    if !options.detect_zeroes {
        return writer.data(offset, chunk);
    }
    let mut at = offset;
    for run in chunk.chunks(ZERO_BLOCK).collect::<Vec<_>>().chunk_by(|a, b| is_zero(a) == is_zero(b)) {
        let len: usize = run.iter().map(|block| block.len()).sum();
        let bytes = &chunk[(at - offset) as usize..][..len];
        if !is_zero(run[0]) {
            writer.data(at, bytes)?;
        } else if !options.is_base {
            writer.zero(at, len as u64)?;
        }
        at += len as u64;
    }
    Ok(())
}

fn is_zero(block: &[u8]) -> bool {
    block == &[0u8; ZERO_BLOCK][..block.len()]
}
