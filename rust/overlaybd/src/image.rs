//! An image: a stack of layers with at most one writable upper.

use std::io;
use std::sync::{Arc, RwLock};

use crate::index::{Place, Segment};
use crate::layer::Layer;
use crate::lsmt::SECTOR;
use crate::stack::{Stack, StackError};
use crate::sync::{read, write};
use crate::upper::{FlushError, SealError, Upper};
use crate::ByteSource;

/// Bytes that the kernel is told to read ahead at a time: it takes no more than a device's `read_ahead_kb`, usually this much.
const AHEAD: u64 = 128 << 10;
/// How far before what is read ahead its surroundings are looked at.
const LOOK_BACK: u64 = 1 << 20;

/// Why bytes cannot be read.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum ReadError {
    /// reading {len} bytes at {offset} of layer {layer}'s file failed
    Source {
        /// Position of the layer from the bottom; the upper comes after the last.
        layer: u16,
        /// Byte in that layer's file.
        offset: u64,
        /// How many bytes were wanted.
        len: usize,
        /// What the source said.
        source: io::Error,
    },
}

/// Why bytes cannot be written, zeroed or discarded.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum WriteError {
    /// the image has no writable upper
    ReadOnly,
    /// {len} bytes at {offset} reach beyond the image's {size} bytes
    OutOfRange {
        /// Where they go.
        offset: u64,
        /// How many there are.
        len: u64,
        /// Virtual size of the image.
        size: u64,
    },
    /// reading what surrounds an unaligned write failed
    Read(#[from] ReadError),
    /// writing to the upper failed
    Io(#[from] io::Error),
    /// making earlier writes durable failed
    Flush(#[from] FlushError),
    /// the upper was sealed and takes no more writes
    Sealed,
}

impl ReadError {
    /// The kernel's error number, if the failure came from there: what a guest should be told.
    pub fn raw_os_error(&self) -> Option<i32> {
        let Self::Source { source, .. } = self;
        source.raw_os_error()
    }
}

impl WriteError {
    /// The kernel's error number, if the failure came from there (`ENOSPC` for a full disk): what a guest should be told.
    pub fn raw_os_error(&self) -> Option<i32> {
        match self {
            Self::Io(error) => error.raw_os_error(),
            Self::Read(error) => error.raw_os_error(),
            Self::Flush(error) => error.raw_os_error(),
            Self::ReadOnly | Self::OutOfRange { .. } | Self::Sealed => None,
        }
    }
}

/// What an operation sees, from its start to its end.
struct View {
    stack: Arc<Stack>,
    upper: Option<Arc<Upper>>,
}

/// An image that any number of threads may read and write at once.
///
/// A seal or a swap of layers replaces the view; operations under way finish on the one they began with, whose
/// bytes do not change.
pub struct Image {
    view: RwLock<Arc<View>>,
    size: u64,
}

impl Image {
    /// An image of layers only.
    pub fn read_only(stack: Arc<Stack>) -> Self {
        let size = stack.virtual_size();
        Self { view: RwLock::new(Arc::new(View { stack, upper: None })), size }
    }

    /// An image with a writable upper, which decides the size.
    ///
    /// # Errors
    /// [`StackError::Parent`] if the upper was made on top of another layer.
    pub fn writable(stack: Arc<Stack>, upper: Arc<Upper>) -> Result<Self, StackError> {
        let (expected, found) = (upper.info().parent, stack.top());
        if !expected.is_nil() && !found.is_nil() && expected != found {
            return Err(StackError::Parent { layer: stack.layers().len(), expected, found });
        }
        let size = upper.info().virtual_size;
        Ok(Self { view: RwLock::new(Arc::new(View { stack, upper: Some(upper) })), size })
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The layers as they are now.
    pub fn stack(&self) -> Arc<Stack> {
        self.view().stack.clone()
    }

    /// The upper as it is now.
    pub fn upper(&self) -> Option<Arc<Upper>> {
        self.view().upper.clone()
    }

    /// Reads bytes, fewer than asked for at the end of the image.
    ///
    /// # Errors
    /// [`ReadError`] if a layer's source or the upper failed.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> Result<usize, ReadError> {
        let len = self.size.saturating_sub(offset).min(buf.len() as u64) as usize;
        self.view().read(&mut buf[..len], offset)?;
        Ok(len)
    }

    /// Has the kernel read a range ahead, as far as it lies in local files. Waits for nothing and is a hint only.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        let end = offset.saturating_add(len).min(self.size);
        if offset < end {
            self.view().read_ahead(offset, end);
        }
    }

    /// Writes bytes. Whole sectors (4096 bytes in a sparse upper) are fastest; edges of others are read first.
    ///
    /// Once this returns, reads see the bytes; they survive a crash after the next [`Image::flush`].
    ///
    /// # Errors
    /// [`WriteError`]; the image is as before, at least outside the range.
    pub fn write_at(&self, buf: &[u8], offset: u64) -> Result<(), WriteError> {
        self.check_range(offset, buf.len() as u64)?;
        if buf.is_empty() {
            return Ok(());
        }
        self.with_upper(|view, upper| {
            if upper.is_aligned(offset, buf.len() as u64) {
                upper.write(buf, offset)
            } else {
                upper.write_unaligned(buf, offset, |block, at| view.read(block, at))
            }
        })
    }

    /// Makes a range read as zeroes, exactly. Costs no space where nothing was written.
    ///
    /// # Errors
    /// [`WriteError`].
    pub fn zero_at(&self, offset: u64, len: u64) -> Result<(), WriteError> {
        self.check_range(offset, len)?;
        let granule = self.upper().ok_or(WriteError::ReadOnly)?.granule();
        let start = offset.next_multiple_of(granule);
        let end = (offset + len) / granule * granule;
        if start >= end {
            return self.write_at(&vec![0; len as usize], offset);
        }
        self.write_at(&vec![0; (start - offset) as usize], offset)?;
        self.zero_aligned(start, end)?;
        self.write_at(&vec![0; (offset + len - end) as usize], end)
    }

    /// Gives up the content of a range: what of it is whole sectors (blocks, in a sparse upper) then reads as zeroes.
    ///
    /// # Errors
    /// [`WriteError`].
    pub fn discard_at(&self, offset: u64, len: u64) -> Result<(), WriteError> {
        self.check_range(offset, len)?;
        let granule = self.upper().ok_or(WriteError::ReadOnly)?.granule();
        self.zero_aligned(offset.next_multiple_of(granule), (offset + len) / granule * granule)
    }

    fn zero_aligned(&self, start: u64, end: u64) -> Result<(), WriteError> {
        if start >= end {
            return Ok(());
        }
        self.with_upper(|view, upper| {
            let mut segments = Vec::new();
            view.resolve(start / SECTOR, end / SECTOR, &mut segments);
            for segment in segments {
                if matches!(segment.place, Place::Data { .. }) {
                    upper.zero(segment.offset * SECTOR, segment.len * SECTOR, &view.stack)?;
                }
            }
            Ok(())
        })
    }

    /// Makes every write that has returned durable.
    ///
    /// # Errors
    /// [`FlushError`]; nothing is lost and the call may be repeated.
    pub fn flush(&self) -> Result<(), FlushError> {
        let view = self.view();
        view.stack.sync().map_err(FlushError::Data)?;
        view.upper.as_ref().map_or(Ok(()), |upper| upper.flush())
    }

    /// The snapshot of a live disk: seals the upper into a layer on top of the stack, and goes on writing to `next`,
    /// an empty upper of the same size whose parent is the sealed layer.
    ///
    /// Only metadata is written, and nothing is waited for to reach the disk: [`Layer::sync`] or the next
    /// [`Image::flush`] does that, and until then the sealed upper's index log must be kept.
    ///
    /// # Errors
    /// [`SealError`]; the image goes on with the upper it had.
    pub fn seal_and_continue(&self, next: Arc<Upper>) -> Result<Arc<Layer>, SealError> {
        if next.info().virtual_size != self.size {
            return Err(SealError::Size { next: next.info().virtual_size, size: self.size });
        }
        self.replace_upper(Some(next))
    }

    /// Seals the upper into a layer; the image is then read-only.
    ///
    /// # Errors
    /// [`SealError`]; the image goes on with the upper it had.
    pub fn seal(&self) -> Result<Arc<Layer>, SealError> {
        self.replace_upper(None)
    }

    fn replace_upper(&self, next: Option<Arc<Upper>>) -> Result<Arc<Layer>, SealError> {
        // Holding the view keeps new operations out until the next one is in place.
        let mut view = write(&self.view);
        let upper = view.upper.as_ref().ok_or(SealError::ReadOnly)?;
        if next.as_ref().is_some_and(|next| !next.info().parent.is_nil() && next.info().parent != upper.info().uuid) {
            return Err(SealError::Parent);
        }
        if view.stack.layers().len() >= crate::MAX_LAYERS {
            return Err(SealError::Stack(StackError::TooMany(crate::MAX_LAYERS + 1)));
        }
        let (layer, table) = upper.seal()?;
        let layer = Arc::new(layer);
        let stack = Arc::new(view.stack.push(layer.clone(), table)?);
        *view = Arc::new(View { stack, upper: next });
        Ok(layer)
    }

    /// Replaces a run of layers by one that reads the same, while the image is in use.
    ///
    /// # Errors
    /// [`StackError::NotThere`] if the run is not part of the image, or reading an index failed.
    pub fn replace_layers(&self, run: &[Arc<Layer>], by: &Arc<Layer>) -> Result<(), StackError> {
        loop {
            let before = self.stack();
            let after = Arc::new(before.replace(run, by.clone())?);
            let mut view = write(&self.view);
            if Arc::ptr_eq(&view.stack, &before) {
                *view = Arc::new(View { stack: after, upper: view.upper.clone() });
                return Ok(());
            }
            // A seal came in between; the run is still there, beneath the new layer.
        }
    }

    /// Splits the sectors `start..end` by where they live now.
    pub fn resolve(&self, start: u64, end: u64) -> Vec<Segment> {
        let mut segments = Vec::new();
        self.view().resolve(start, end, &mut segments);
        segments
    }

    fn view(&self) -> Arc<View> {
        read(&self.view).clone()
    }

    /// Runs an operation on the upper, again if it was sealed meanwhile and another one took its place.
    fn with_upper(&self, run: impl Fn(&View, &Upper) -> Result<(), WriteError>) -> Result<(), WriteError> {
        loop {
            let view = self.view();
            let upper = view.upper.as_ref().ok_or(WriteError::ReadOnly)?;
            match run(&view, upper) {
                Err(WriteError::Sealed) if !Arc::ptr_eq(&view, &self.view()) => {}
                result => return result,
            }
        }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), WriteError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(WriteError::OutOfRange { offset, len, size: self.size }),
        }
    }
}

impl View {
    fn resolve(&self, start: u64, end: u64, out: &mut Vec<Segment>) {
        match &self.upper {
            Some(upper) => upper.resolve(&self.stack, start, end, out),
            None => self.stack.resolve(start, end, out),
        }
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
        if buf.is_empty() {
            return Ok(());
        }
        let mut segments = Vec::new();
        self.resolve(offset / SECTOR, (offset + buf.len() as u64).div_ceil(SECTOR), &mut segments);
        fill(buf, offset, &segments, |layer| self.source(layer))
    }

    /// What follows in a layer's file on what was read of it before, the kernel reads ahead by itself, and cheaper.
    fn read_ahead(&self, offset: u64, end: u64) {
        let (first, mut segments) = (offset / SECTOR, Vec::new());
        self.resolve(first.saturating_sub(LOOK_BACK / SECTOR), end.div_ceil(SECTOR), &mut segments);
        // Where the reader left each layer's file.
        let mut left: Vec<(u16, u64)> = Vec::new();
        for segment in segments {
            let Place::Data { layer, sector } = segment.place else { continue };
            let last = sector + segment.len;
            let jumps = match left.iter_mut().find(|(known, _)| *known == layer) {
                Some((_, at)) => std::mem::replace(at, last) != sector,
                None => {
                    left.push((layer, last));
                    true
                }
            };
            let source = self.source(layer);
            // A source that is no file may have to wait for its bytes.
            if !jumps || segment.offset < first || source.as_file().is_none() {
                continue;
            }
            for at in (sector * SECTOR..last * SECTOR).step_by(AHEAD as usize) {
                // The read itself will tell what is wrong.
                let _ = source.prefetch(at, AHEAD.min(last * SECTOR - at));
            }
        }
    }

    fn source(&self, layer: u16) -> &dyn ByteSource {
        match (self.stack.layers().get(usize::from(layer)), &self.upper) {
            (Some(layer), _) => &**layer.source(),
            (None, Some(upper)) => upper.source(),
            // Only an upper's own entries carry the number after the last layer.
            (None, None) => &EMPTY,
        }
    }
}

/// Fills `buf`, which starts at byte `offset` of the image, from the segments that cover it.
pub(crate) fn fill<'a>(
    buf: &mut [u8],
    offset: u64,
    segments: &[Segment],
    source_of: impl Fn(u16) -> &'a dyn ByteSource,
) -> Result<(), ReadError> {
    let buf_end = offset + buf.len() as u64;
    for segment in segments {
        let start = (segment.offset * SECTOR).max(offset);
        let end = (segment.end() * SECTOR).min(buf_end);
        if start >= end {
            continue;
        }
        let part = &mut buf[(start - offset) as usize..(end - offset) as usize];
        match segment.place {
            Place::Hole | Place::Zero => part.fill(0),
            Place::Data { layer, sector } => {
                let at = sector * SECTOR + (start - segment.offset * SECTOR);
                source_of(layer).read_exact_at(part, at).map_err(|source| ReadError::Source {
                    layer,
                    offset: at,
                    len: part.len(),
                    source,
                })?;
            }
        }
    }
    Ok(())
}

struct Nothing;

static EMPTY: Nothing = Nothing;

impl ByteSource for Nothing {
    fn size(&self) -> u64 {
        0
    }

    fn read_exact_at(&self, _buf: &mut [u8], _offset: u64) -> io::Result<()> {
        Err(io::ErrorKind::UnexpectedEof.into())
    }
}
