//! What a hostile file is put through: opening, stacking, reading, compacting. Shared with the fuzz targets.

use std::io::{self, Write};
use std::sync::Arc;

use overlaybd::{
    compact, ByteSource, CompactOptions, Image, Layer, MemorySource, ParentCheck, Stack, Upper, MAX_VIRTUAL_SIZE,
};

/// Takes so many bytes, then is full.
struct Limited(usize);

impl Write for Limited {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self.0.checked_sub(buf.len()) {
            Some(left) => {
                self.0 = left;
                Ok(buf.len())
            }
            None => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Uses bytes as a layer. True if they were good enough to be stacked.
pub fn layer(bytes: &[u8]) -> bool {
    let source: Arc<dyn ByteSource> = Arc::new(MemorySource::new(bytes));
    let Ok(layer) = Layer::open(source) else { return false };
    let layer = Arc::new(layer);
    let Ok(stack) = Stack::open(vec![layer.clone(), layer.clone()], ParentCheck::Ignore) else { return false };
    let size = stack.virtual_size();
    let image = Image::read_only(Arc::new(stack));
    let mut buf = vec![0; 70_000];
    for offset in [0, 1, 511, 4096, 1 << 20, size / 2, size.saturating_sub(40_000), size, MAX_VIRTUAL_SIZE, u64::MAX] {
        if let Ok(len) = image.read_at(&mut buf, offset) {
            assert!(len as u64 <= size.saturating_sub(offset));
        }
    }
    let options = CompactOptions { is_base: true, detect_zeroes: bytes.len() % 2 == 0, uuid: None };
    let _ = compact(&[layer], Limited(256 << 10), &options);
    true
}

/// Uses two files as an upper. True if they were good enough to be opened.
pub fn upper(data: std::fs::File, index: Option<std::fs::File>) -> bool {
    let Ok(upper) = Upper::open(data, index) else { return false };
    let Ok(image) = Image::writable(Arc::new(Stack::empty()), Arc::new(upper)) else { return false };
    let mut buf = vec![0; 70_000];
    for offset in [0, 511, 4096, image.size() / 2, image.size().saturating_sub(40_000), u64::MAX] {
        let _ = image.read_at(&mut buf, offset);
        let _ = image.write_at(&buf[..600], offset);
        let _ = image.discard_at(offset, 5000);
    }
    let _ = image.flush();
    let _ = image.seal();
    let _ = image.read_at(&mut buf, 0);
    true
}
