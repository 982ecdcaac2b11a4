//! Writing new layer files, and folding layers into one.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use overlaybd::zfile::ZFileWriter;
use overlaybd::{CompactOptions, Digest, DigestWriter, Layer};
use std::sync::Arc;

use crate::image::files::NewFile;
use crate::image::{Attached, LayerSpec, Layers, ZFileSpec};
use crate::{Code, Error};

/// Bytes gathered before they are written.
const BUFFER: usize = 256 << 10;

/// What kind of file to make.
#[derive(Debug, Clone, Copy, Default)]
pub struct Output {
    /// Compress it.
    pub zfile: Option<ZFileSpec>,
    /// Tell its digest.
    pub digest: bool,
}

/// A file that was made.
#[derive(Debug, Clone, Copy)]
pub struct Made {
    /// Bytes of the file.
    pub bytes: u64,
    /// Entries of the layer's index.
    pub extents: u64,
    /// Of the file, if asked for.
    pub digest: Option<Digest>,
}

enum Sink<'a> {
    Plain(&'a File),
    Digest(DigestWriter<&'a File>),
}

impl Write for Sink<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Self::Plain(file) => file.write(buf),
            Self::Digest(writer) => writer.write(buf),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes one file at `path`: `body` gives the bytes of a plain layer and says how many index entries it has.
pub fn write_file(
    path: &Path,
    output: Output,
    body: impl FnOnce(&mut dyn Write) -> Result<u64, Error>,
) -> Result<Made, Error> {
    let failed = |e: io::Error| Error::io(format_args!("writing {}", path.display()), &e);
    let new = NewFile::create(path)?;
    let sink = match output.digest {
        true => Sink::Digest(DigestWriter::new(new.file())),
        false => Sink::Plain(new.file()),
    };
    let mut out = BufWriter::with_capacity(BUFFER, sink);
    let extents = match output.zfile {
        None => body(&mut out)?,
        Some(zfile) => {
            let mut packed = ZFileWriter::new(&mut out, zfile.into())
                .map_err(|e| Error::caused(Code::Invalid, format_args!("writing {}", path.display()), &e))?;
            let extents = body(&mut packed)?;
            packed.finish().map_err(failed)?;
            extents
        }
    };
    let digest = match out.into_inner().map_err(|e| failed(e.into_error()))? {
        Sink::Plain(_) => None,
        Sink::Digest(writer) => Some(writer.finish().1),
    };
    let bytes = new.file().metadata().map_err(failed)?.len();
    new.publish()?;
    Ok(Made { bytes, extents, digest })
}

/// Folds layers, the lowest first, into the file `path`. `is_base` says that nothing lies beneath, so zeroes need no entry.
///
/// # Errors
/// The layers cannot be read, or the file cannot be written.
pub fn compact(layers: &[Arc<Layer>], is_base: bool, path: &Path, output: Output) -> Result<Made, Error> {
    let options = CompactOptions { is_base, detect_zeroes: true, uuid: None };
    write_file(path, output, |out| {
        let compacted = overlaybd::compact(layers, out, &options);
        let (_, summary) =
            compacted.map_err(|e| Error::caused(Code::Io, format_args!("compacting to {}", path.display()), &e))?;
        Ok(summary.extents)
    })
}

/// A run of the layers of an attached image, and where its compacted form goes.
pub struct CompactRun<'a> {
    /// Positions, counted from the lowest layer.
    pub run: Range<usize>,
    /// The new layer's file.
    pub path: &'a Path,
    /// What kind of file.
    pub output: Output,
}

/// Folds a run of an attached image's layers into one file, and puts that in their place while the image is in use.
///
/// # Errors
/// [`Code::Invalid`] if there is no such run; as [`compact`]. The image is then as before.
pub fn compact_run(image: &Attached, request: &CompactRun<'_>, layers: &Layers) -> Result<Made, Error> {
    let stack = image.image()?.stack();
    let Range { start, end } = request.run;
    let run = stack.layers().get(start..end).filter(|run| !run.is_empty()).ok_or_else(|| {
        let (name, count) = (image.name(), stack.layers().len());
        Error::invalid(format!("image {name} has {count} layers: {start} to {end} (exclusive) is no run of them"))
    })?;
    let made = compact(run, start == 0, request.path, request.output)?;
    let by = layers.layer(&LayerSpec::file(request.path))?;
    // Only now may no seal or detach come in between.
    let _guard = image.upper();
    image
        .image()?
        .replace_layers(run, &by)
        .map_err(|e| Error::caused(Code::Io, format_args!("compacting image {}", image.name()), &e))?;
    image.note_file(&by, request.path);
    Ok(made)
}
