//! Opening layers, each only once however many images are made of it.

use std::borrow::Borrow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::hash::Hash;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use overlaybd::{ByteSource, FileSource, Layer, ParentCheck, Stack};

use crate::image::spec::check_path;
use crate::image::LayerSpec;
use crate::{Code, Error};

/// Opens the bytes of a layer, wherever they are.
pub trait LayerSources: Send + Sync {
    /// The layer's bytes, compressed or not.
    ///
    /// # Errors
    /// They are not there, or the description makes no sense.
    fn open(&self, spec: &LayerSpec) -> Result<Arc<dyn ByteSource>, Error>;

    /// What the block cache holds and did.
    ///
    /// # Errors
    /// [`Code::Unsupported`] without a cache.
    fn cache_stat(&self) -> Result<serde_json::Value, Error> {
        Err(no_cache())
    }

    /// Takes new headers for the open layers whose addresses start with `url`; gives how many there are.
    ///
    /// # Errors
    /// [`Code::Unsupported`] without a cache.
    fn credentials(&self, _url: &str, _headers: &BTreeMap<String, String>) -> Result<usize, Error> {
        Err(no_cache())
    }
}

fn no_cache() -> Error {
    Error::new(Code::Unsupported, "this daemon has no block cache")
}

/// Local files, and nothing else.
pub struct FilesOnly;

impl LayerSources for FilesOnly {
    fn open(&self, spec: &LayerSpec) -> Result<Arc<dyn ByteSource>, Error> {
        match spec {
            LayerSpec { path: Some(path), url: None, .. } => open_file(path),
            LayerSpec { url: Some(url), .. } => {
                let Error { code, message } = no_cache();
                Err(Error::new(code, format!("layer {url}: {message}")))
            }
            _ => Err(Error::invalid("a layer needs a path or a url")),
        }
    }
}

/// Opens a local layer file.
///
/// # Errors
/// It is not there, or is no file.
pub fn open_file(path: &Path) -> Result<Arc<dyn ByteSource>, Error> {
    check_path(path)?;
    let source = File::open(path).and_then(FileSource::new);
    Ok(Arc::new(source.map_err(|e| Error::io(format_args!("opening layer {}", path.display()), &e))?))
}

/// What makes two layers the same.
#[derive(PartialEq, Eq, Hash, Clone)]
enum Identity {
    /// A file as it was when it was opened: a changed one is another layer.
    File {
        device: u64,
        inode: u64,
        size: u64,
        modified: (i64, i64),
    },
    Remote(Box<LayerSpec>),
}

/// Layers and stacks in use, shared by all images.
pub struct Layers {
    sources: Box<dyn LayerSources>,
    layers: Mutex<Shared<Identity, Layer>>,
    /// By the addresses of their layers, which a live stack keeps from being used again.
    stacks: Mutex<Shared<Vec<usize>, Stack>>,
}

impl Layers {
    /// Nothing open yet.
    pub fn new(sources: Box<dyn LayerSources>) -> Self {
        Self { sources, layers: Mutex::default(), stacks: Mutex::default() }
    }

    /// Where layers come from.
    pub fn sources(&self) -> &dyn LayerSources {
        &*self.sources
    }

    /// Opens one layer.
    ///
    /// # Errors
    /// As [`LayerSources::open`], or [`Code::Corrupt`] if it is no layer.
    pub fn layer(&self, spec: &LayerSpec) -> Result<Arc<Layer>, Error> {
        let identity = identify(spec)?;
        if let Some(layer) = lock(&self.layers).get(&identity) {
            return Ok(layer);
        }
        let source = self.sources.open(spec)?;
        let layer = Layer::open(source)
            .map_err(|e| Error::caused(Code::Corrupt, format_args!("opening layer {}", name(spec)), &e))?;
        Ok(lock(&self.layers).put(identity, Arc::new(layer)))
    }

    /// Makes a layer that is already open the one that its file stands for.
    pub fn adopt(&self, path: &Path, layer: &Arc<Layer>) {
        // Without an identity the file is merely opened again when it is asked for.
        if let Ok(identity) = identify(&LayerSpec::file(path)) {
            lock(&self.layers).put(identity, layer.clone());
        }
    }

    /// Opens layers, the lowest first, as one stack.
    ///
    /// # Errors
    /// As [`Layers::layer`], or [`Code::Corrupt`] if they do not belong on top of each other.
    pub fn stack(&self, specs: &[LayerSpec]) -> Result<Arc<Stack>, Error> {
        if specs.len() > overlaybd::MAX_LAYERS {
            let most = overlaybd::MAX_LAYERS;
            return Err(Error::invalid(format!("{} layers: an image has at most {most}; compact some", specs.len())));
        }
        let layers = specs.iter().map(|spec| self.layer(spec)).collect::<Result<Vec<_>, _>>()?;
        let key: Vec<usize> = layers.iter().map(|layer| Arc::as_ptr(layer) as usize).collect();
        if let Some(stack) = lock(&self.stacks).get(&key) {
            return Ok(stack);
        }
        let names = || specs.iter().map(name).collect::<Vec<_>>().join(", ");
        let stack = match self.longest_beneath(&key) {
            Some(beneath) => beneath.extend(&layers[beneath.layers().len()..], ParentCheck::Enforce),
            None => Stack::open(layers, ParentCheck::Enforce),
        };
        let stack = stack.map_err(|e| Error::caused(Code::Corrupt, format_args!("stacking {}", names()), &e))?;
        Ok(lock(&self.stacks).put(key, Arc::new(stack)))
    }

    /// The largest open stack of the lowest of these layers: whoever forks or pauses again and again adds little to much.
    fn longest_beneath(&self, key: &[usize]) -> Option<Arc<Stack>> {
        let stacks = lock(&self.stacks);
        (1..key.len()).rev().find_map(|n| stacks.get(&key[..n]))
    }
}

fn identify(spec: &LayerSpec) -> Result<Identity, Error> {
    match spec {
        LayerSpec { path: Some(path), url: None, .. } => {
            check_path(path)?;
            let about = std::fs::metadata(path);
            let about = about.map_err(|e| Error::io(format_args!("opening layer {}", path.display()), &e))?;
            if !about.is_file() {
                return Err(Error::invalid(format!("layer {} is not a regular file", path.display())));
            }
            let modified = (about.mtime(), about.mtime_nsec());
            Ok(Identity::File { device: about.dev(), inode: about.ino(), size: about.len(), modified })
        }
        _ => Ok(Identity::Remote(Box::new(spec.clone()))),
    }
}

/// What to call a layer in messages.
fn name(spec: &LayerSpec) -> String {
    match (&spec.path, &spec.url) {
        (Some(path), _) => path.display().to_string(),
        (None, Some(url)) => url.clone(),
        (None, None) => "without path and url".into(),
    }
}

/// Things that live as long as somebody else uses them.
struct Shared<K, V> {
    entries: HashMap<K, Weak<V>>,
    /// Entries at which dead ones are swept out next.
    sweep_at: usize,
}

impl<K, V> Default for Shared<K, V> {
    fn default() -> Self {
        Self { entries: HashMap::new(), sweep_at: 64 }
    }
}

impl<K: Hash + Eq, V> Shared<K, V> {
    fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
    {
        self.entries.get(key)?.upgrade()
    }

    /// Enters a value, unless another thread was faster; gives what is there.
    fn put(&mut self, key: K, value: Arc<V>) -> Arc<V> {
        if let Some(earlier) = self.get(&key) {
            return earlier;
        }
        if self.entries.len() >= self.sweep_at {
            self.entries.retain(|_, value| value.strong_count() > 0);
            self.sweep_at = 64.max(2 * self.entries.len());
        }
        self.entries.insert(key, Arc::downgrade(&value));
        value
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
