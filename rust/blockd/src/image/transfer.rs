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
use sha2::{Digest as _, Sha256};

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
            Self::Image(image) => image.resolve(start, end),
            Self::Stack(stack) => {
                let mut segments = Vec::new();
                stack.resolve(start, end, &mut segments);
                segments
            }
        }
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> Result<(), Error> {
        let read = match self {
            Self::Image(image) => image.image()?.read_at(buf, offset),
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

/// Turns a raw disk image (a file or a block device) into a layer. Zeroes and holes are left out. The same content gives the same
/// file, identifier and all.
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
    // The identifier comes first in the file and from all of the content, so that is read twice.
    let uuid = content_uuid(&file, size).map_err(failed)?;
    write_file(path, output, |out| {
        write_layer(out, size.next_multiple_of(SECTOR), uuid, |writer| {
            let mut content = ContentHash::new(size);
            for_each_run(&file, size, |at, run| {
                content.add(at, run);
                writer.data(at, run).map_err(|e| Error::caused(Code::Invalid, "writing the layer", &e))
            })
            .map_err(failed)??;
            match content.uuid() == uuid {
                true => Ok(()),
                false => Err(Error::new(Code::Busy, format!("{} changed while it was read", input.display()))),
            }
        })
    })
}

/// What an image holds, wherever its holes are.
struct ContentHash(Sha256);

impl ContentHash {
    fn new(size: u64) -> Self {
        let mut hash = Sha256::new();
        hash.update(b"aenv raw image");
        hash.update(size.to_le_bytes());
        Self(hash)
    }

    fn add(&mut self, at: u64, run: &[u8]) {
        self.0.update(at.to_le_bytes());
        self.0.update((run.len() as u64).to_le_bytes());
        self.0.update(run);
    }

    /// Of version 8 (RFC 9562): what the bits are is up to us.
    fn uuid(self) -> Uuid {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.0.finalize()[..16]);
        bytes[6] = (bytes[6] & 0x0f) | 0x80;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Uuid::from_bytes(bytes)
    }
}

fn content_uuid(file: &File, size: u64) -> std::io::Result<Uuid> {
    let mut content = ContentHash::new(size);
    for_each_run(file, size, |at, run| -> Result<(), std::convert::Infallible> {
        content.add(at, run);
        Ok(())
    })?
    .unwrap_or_else(|never| match never {});
    Ok(content.uuid())
}

/// Gives every run of blocks that are not zero, in order, cut at multiples of [`COPY`]: the same ones for the same content, wherever
/// the file system has holes. Whole sectors; what is missing of the last one is zero.
fn for_each_run<E>(
    file: &File,
    size: u64,
    mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
) -> std::io::Result<Result<(), E>> {
    let block = ZERO_BLOCK as u64;
    let mut buf = vec![0; COPY as usize];
    let mut at = 0;
    while let Some(start) = next_data(file, at)?.filter(|start| *start < size) {
        let end = seek(file, SeekFrom::Hole(start)).unwrap_or(size).next_multiple_of(block).min(size);
        at = at.max(start / block * block);
        while at < end {
            let len = (end - at).min(COPY - at % COPY) as usize;
            file.read_exact_at(&mut buf[..len], at)?;
            let whole = len.next_multiple_of(SECTOR as usize);
            buf[len..whole].fill(0);
            for (from, run, _) in blocks(&buf[..whole]).filter(|(_, _, zero)| !zero) {
                if let Err(error) = take(at + from as u64, run) {
                    return Ok(Err(error));
                }
            }
            at += len as u64;
        }
    }
    Ok(Ok(()))
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
            // Not by content: an image in use may change meanwhile.
            let uuid = Uuid::random().map_err(|e| Error::io("choosing an identifier", &e))?;
            write_layer(out, view.size().next_multiple_of(SECTOR), uuid, |writer| {
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
    uuid: Uuid,
    fill: impl FnOnce(&mut LayerWriter<&'a mut dyn Write>) -> Result<(), Error>,
) -> Result<u64, Error> {
    let failed = |e: overlaybd::WriteLayerError| Error::caused(Code::Invalid, "writing the layer", &e);
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
    use crate::image::Codec;

    #[test]
    fn equal_images_are_equal_layers() {
        let dir = tempfile::tempdir().expect("directory");
        let path = |name: &str| dir.path().join(name);
        // Runs across the borders of what is read at once, an odd end, and zeroes that may or may not be holes.
        let mut image = vec![0u8; (5 << 20) + 700];
        image[1 << 20..3 << 20].fill(7);
        image[(4 << 20) + 5000] = 1;
        image[(5 << 20) + 699] = 2;
        std::fs::write(path("full"), &image).expect("written");
        let sparse = File::create(path("sparse")).expect("created");
        sparse.set_len(image.len() as u64).expect("sized");
        for (at, len) in [(1 << 20, 2 << 20), ((4 << 20) + 4096, 4096), (5 << 20, 700)] {
            sparse.write_all_at(&image[at..at + len], at as u64).expect("written");
        }
        let zfile = Some(ZFileSpec { algorithm: Codec::Lz4, block_size: 4096 });
        for output in [Output::default(), Output { zfile, digest: true }] {
            let made = ["full", "sparse"].map(|name| {
                let layer = path("layer");
                import(&path(name), &layer, output).expect("imported");
                let bytes = std::fs::read(&layer).expect("layer");
                std::fs::remove_file(layer).expect("removed");
                bytes
            });
            assert!(made[0] == made[1]);
        }
        let uuid = |image: &[u8]| {
            std::fs::write(path("other"), image).expect("written");
            content_uuid(&File::open(path("other")).expect("file"), image.len() as u64).expect("read")
        };
        let whole = uuid(&image);
        assert_ne!(uuid(&image[..image.len() - 1]), whole, "length");
        image.swap(1 << 20, 1);
        assert_ne!(uuid(&image), whole, "place");
    }

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
