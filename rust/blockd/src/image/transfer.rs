//! Raw disk images in, and images out.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;

use overlaybd::{LayerInfo, LayerWriter, Place, Segment, Stack, Uuid, SECTOR};
use rustix::fs::{seek, SeekFrom};
use rustix::io::Errno;
use serde::Deserialize;

use crate::image::files::NewFile;
use crate::image::make::{write_file, Made, Output};
use crate::image::spec::check_path;
use crate::image::{Attached, ZFileSpec};
use crate::{Code, Error};

/// Bytes copied at a time.
const COPY: u64 = 1 << 20;
/// Sectors looked up at a time.
const LOOKUP: u64 = 1 << 16;
/// Granularity of zero detection, in bytes.
const ZERO_BLOCK: usize = 4096;

/// What an export makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// A raw image with holes.
    Raw,
    /// One layer.
    Layer,
    /// One compressed layer.
    Zfile,
}

/// What is exported.
pub enum View {
    /// An attached image with its upper. Writes that happen meanwhile may or may not be in the result: seal first.
    Image(Arc<Attached>),
    /// Layers.
    Stack(Arc<Stack>),
}

impl View {
    fn size(&self) -> u64 {
        match self {
            Self::Image(image) => image.size(),
            Self::Stack(stack) => stack.virtual_size(),
        }
    }

    fn resolve(&self, start: u64, end: u64) -> Vec<Segment> {
        match self {
            Self::Image(image) => image.image().resolve(start, end),
            Self::Stack(stack) => {
                let mut segments = Vec::new();
                stack.resolve(start, end, &mut segments);
                segments
            }
        }
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let read = match self {
            Self::Image(image) => image.image().read_at(buf, offset),
            Self::Stack(stack) => stack.read_at(buf, offset),
        };
        read.map(drop).map_err(|e| Error::caused(Code::Io, "reading the image", &e))
    }

    /// Gives every chunk that is not known to be zero, in order.
    fn for_each_chunk(&self, mut take: impl FnMut(u64, &[u8]) -> Result<(), Error>) -> Result<(), Error> {
        let mut buf = vec![0; COPY as usize];
        let sectors = self.size().div_ceil(SECTOR);
        for start in (0..sectors).step_by(LOOKUP as usize) {
            for segment in self.resolve(start, (start + LOOKUP).min(sectors)) {
                let (mut at, end) = (segment.offset * SECTOR, (segment.end() * SECTOR).min(self.size()));
                while at < end && matches!(segment.place, Place::Data { .. }) {
                    let chunk = &mut buf[..(end - at).min(COPY) as usize];
                    self.read(chunk, at)?;
                    take(at, chunk)?;
                    at += chunk.len() as u64;
                }
            }
        }
        Ok(())
    }
}

/// Turns a raw disk image (a file or a block device) into a layer. Zeroes and holes are left out.
///
/// # Errors
/// The input cannot be read, or the layer cannot be written.
pub fn import(input: &Path, path: &Path, output: Output) -> Result<Made, Error> {
    check_path(input)?;
    let failed = |e: std::io::Error| Error::io(format_args!("reading {}", input.display()), &e);
    let file = File::open(input).map_err(failed)?;
    let kind = file.metadata().map_err(failed)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(Error::invalid(format!("{} is neither a file nor a block device", input.display())));
    }
    let size = seek(&file, SeekFrom::End(0)).map_err(|e| failed(e.into()))?;
    if size == 0 {
        return Err(Error::invalid(format!("{} is empty", input.display())));
    }
    write_file(path, output, |out| {
        write_layer(out, size.next_multiple_of(SECTOR), |writer| {
            let mut buf = vec![0; COPY as usize];
            let mut at = 0;
            while let Some(start) = next_data(&file, at).map_err(failed)?.filter(|start| *start < size) {
                let end = seek(&file, SeekFrom::Hole(start)).unwrap_or(size).min(size);
                at = start / SECTOR * SECTOR;
                while at < end {
                    let len = (end - at).min(COPY) as usize;
                    file.read_exact_at(&mut buf[..len], at).map_err(failed)?;
                    let whole = len.next_multiple_of(SECTOR as usize);
                    buf[len..whole].fill(0);
                    put(writer, at, &buf[..whole])?;
                    at += whole as u64;
                }
            }
            Ok(())
        })
    })
}

/// The next offset with data, as far as the file system can tell.
fn next_data(file: &File, at: u64) -> std::io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start)),
        Err(Errno::NXIO) => Ok(None),
        // Block devices and some file systems tell nothing.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(at)),
        Err(error) => Err(error.into()),
    }
}

/// Writes what a view shows as one file.
///
/// # Errors
/// The view cannot be read, or the file cannot be written.
pub fn export(view: &View, path: &Path, format: Format, output: Output) -> Result<Made, Error> {
    match (format, output.zfile) {
        (Format::Raw, None) => export_raw(view, path, output),
        (Format::Layer, None) | (Format::Zfile, Some(_)) => write_file(path, output, |out| {
            write_layer(out, view.size().next_multiple_of(SECTOR), |writer| {
                view.for_each_chunk(|at, chunk| put(writer, at, chunk))
            })
        }),
        (Format::Zfile, None) => {
            let zfile = ZFileSpec { algorithm: crate::image::Codec::Lz4, block_size: 4096 };
            export(view, path, format, Output { zfile: Some(zfile), ..output })
        }
        (Format::Raw | Format::Layer, Some(_)) => Err(Error::invalid("only format \"zfile\" is compressed")),
    }
}

fn export_raw(view: &View, path: &Path, output: Output) -> Result<Made, Error> {
    let failed = |e: std::io::Error| Error::io(format_args!("writing {}", path.display()), &e);
    if output.digest {
        return Err(Error::invalid("a digest is made of layers only, not of raw images"));
    }
    let new = NewFile::create(path)?;
    new.file().set_len(view.size()).map_err(failed)?;
    view.for_each_chunk(|at, chunk| {
        blocks(chunk)
            .filter(|(_, _, zero)| !zero)
            .try_for_each(|(from, block, _)| new.file().write_all_at(block, at + from as u64).map_err(failed))
    })?;
    new.publish()?;
    Ok(Made { bytes: view.size(), extents: 0, digest: None })
}

/// Writes a layer with no parent; gives the number of its index entries.
fn write_layer<'a>(
    out: &'a mut dyn Write,
    size: u64,
    fill: impl FnOnce(&mut LayerWriter<&'a mut dyn Write>) -> Result<(), Error>,
) -> Result<u64, Error> {
    let failed = |e: overlaybd::WriteLayerError| Error::caused(Code::Invalid, "writing the layer", &e);
    let uuid = Uuid::random().map_err(|e| failed(e.into()))?;
    let info = LayerInfo { virtual_size: size, uuid, parent: Uuid::NIL, user_tag: Vec::new() };
    let mut writer = LayerWriter::new(out, info).map_err(failed)?;
    fill(&mut writer)?;
    Ok(writer.finish().map_err(failed)?.1.extents)
}

fn put<W: Write>(writer: &mut LayerWriter<W>, at: u64, chunk: &[u8]) -> Result<(), Error> {
    blocks(chunk).filter(|(_, _, zero)| !zero).try_for_each(|(from, block, _)| {
        writer.data(at + from as u64, block).map_err(|e| Error::caused(Code::Invalid, "writing the layer", &e))
    })
}

/// Splits a chunk into runs of blocks that are all zero or all not: where each starts, its bytes, and which it is.
fn blocks(chunk: &[u8]) -> impl Iterator<Item = (usize, &[u8], bool)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = &chunk[at..];
        let zero = is_zero(rest.chunks(ZERO_BLOCK).next()?);
        let len: usize = rest.chunks(ZERO_BLOCK).take_while(|block| is_zero(block) == zero).map(<[u8]>::len).sum();
        let run = (at, &rest[..len], zero);
        at += len;
        Some(run)
    })
}

fn is_zero(block: &[u8]) -> bool {
    block == &[0u8; ZERO_BLOCK][..block.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_blocks_are_found() {
        let mut chunk = vec![0u8; 5 * ZERO_BLOCK + 100];
        chunk[2 * ZERO_BLOCK] = 1;
        chunk[5 * ZERO_BLOCK + 99] = 1;
        let runs: Vec<_> = blocks(&chunk).map(|(at, bytes, zero)| (at, bytes.len(), zero)).collect();
        let block = ZERO_BLOCK;
        let expected =
            [(0, 2 * block, true), (2 * block, block, false), (3 * block, 2 * block, true), (5 * block, 100, false)];
        assert_eq!(runs, expected);
        assert_eq!(blocks(&[]).count(), 0);
    }
}
